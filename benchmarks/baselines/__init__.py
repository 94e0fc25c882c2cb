"""What a user would write or run instead: loops over Hugging Face's models and PEFT, and vLLM alone."""
