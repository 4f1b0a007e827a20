"""Security: who may come in and what they may do, by tokens, roles and certificates. Knows neither gRPC nor HTTP.

`roles` is the table of rights, `tokens` the file of hashed tokens, `gate` the check that every call passes,
`certificates` the TLS files. The rpc processes and the admin page ask all of them in the same way.
"""
