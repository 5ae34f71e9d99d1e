"""From requests to prompts, and from outputs to answers in OpenAI's forms."""
