"""Processing of requests on the host: from prompts to tokens, and from tokens to text."""
