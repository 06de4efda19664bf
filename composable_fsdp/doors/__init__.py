"""Names and signatures of torch's FSDP1 and FSDP2 over this package's functions."""
