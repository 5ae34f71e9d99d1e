"""What a model says, taken apart as it comes: reasoning, content, calls of tools."""
