"""Makes prompts of requests, and of outputs the answers in OpenAI's forms."""
