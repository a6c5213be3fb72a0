"""What happens to a request outside the device: from a prompt to tokens, and from tokens to text."""
