"""Scripts for developers of this repository; they are not part of the installed package."""
