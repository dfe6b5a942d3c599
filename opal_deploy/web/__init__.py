"""A model as a folder of static files that answers and explains in a browser."""
