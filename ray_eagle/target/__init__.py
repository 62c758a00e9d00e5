"""The target model: find and load it, let it generate, capture its hidden states."""
