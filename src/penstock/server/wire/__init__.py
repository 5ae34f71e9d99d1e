"""Defines what goes over the wire, field by field: requests as clients send them, answers as they are
described."""
