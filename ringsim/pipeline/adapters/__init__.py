"""How different models are seen the same way: embed -> layers -> head."""
