"""One picture on its way to the model: read, decoded, resized, in processes of its own."""
