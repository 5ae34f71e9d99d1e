"""How well a model finds what stands in a long text."""
