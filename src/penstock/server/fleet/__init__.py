"""Puts one server in front of many replicas of its model."""
