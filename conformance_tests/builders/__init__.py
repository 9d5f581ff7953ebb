"""What several tests are built from."""
