"""Host arrays for one dispatch, padded to bucket sizes."""
