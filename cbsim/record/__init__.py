"""The record of a run, its columns, and the tables and files of the run directory."""
