"""Who may come in and what they may do: tokens, roles, certificates. Knows neither gRPC nor HTTP.

`roles` is the table of rights, `tokens` the file of hashed tokens, `gate` what every call passes, `certificates` the
TLS files; the rpc processes and the admin page ask all of them in the same way.
"""
