"""The evidence sheet of one image: a view model, one layout, and a renderer each for PNG and SVG."""
