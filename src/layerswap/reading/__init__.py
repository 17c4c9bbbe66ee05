"""One reader of texts, tables and data sets: line ends, encodings, quotation marks and labels."""
