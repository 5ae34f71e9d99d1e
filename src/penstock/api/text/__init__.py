"""Between texts and token ids: the tokenizer, chat templates in a process of their own, and detokenizing."""
