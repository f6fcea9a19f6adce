"""Charts as values, their drawing, and the folders of reports."""
