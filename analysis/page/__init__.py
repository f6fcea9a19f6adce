"""A report as a folder: Markdown and a page with interactive figures."""
