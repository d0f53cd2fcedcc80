"""What owned matrices are compared with."""
