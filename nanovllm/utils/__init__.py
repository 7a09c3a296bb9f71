"""What more than one part of the library needs and none of them owns."""
