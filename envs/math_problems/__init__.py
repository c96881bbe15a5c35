"""Mathematics: generated problems, and problems of files, with a calculator."""
