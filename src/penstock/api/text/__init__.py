"""Turn texts into token ids and back: the tokenizer, chat templates in their own process, detokenizing."""
