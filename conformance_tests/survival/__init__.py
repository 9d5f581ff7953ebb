"""What must survive: long, hostile and unlucky runs, at a small and at the full size."""
