"""Tasks built on `generate`: scores, embeddings, rankings, beam search."""
