"""Math problems, generated or from files, with a calculator."""
