"""Generation by SGLang: requests and answers in its wire format, whole or as streams, and the calls that carry them."""
