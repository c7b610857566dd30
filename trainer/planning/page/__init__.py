"""Pages of text, HTML and SVG."""
