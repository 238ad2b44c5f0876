"""Which models can be trained: one declaration of tensors and layout for each family."""
