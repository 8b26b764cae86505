"""Corpora: files of texts that `ngram_trie` drafts from."""
