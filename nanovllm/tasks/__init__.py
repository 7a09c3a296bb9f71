"""What is made of `generate`: scores, embeddings, rankings, beams."""
