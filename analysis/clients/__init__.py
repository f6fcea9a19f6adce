"""What clients of a served session measured, beside what its server did."""
