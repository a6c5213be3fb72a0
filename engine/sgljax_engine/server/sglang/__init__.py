"""SGLang's routes."""
