"""Between a user's texts and the engine's token ids."""
