"""Weight synchronisation: rules, proof of coverage, transformation, checkpoint folders."""
