"""Scripts for work on this repository; the package does not contain them."""
