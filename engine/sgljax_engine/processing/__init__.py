"""What happens to a request outside the device: from prompts to tokens, from tokens to text."""
