"""gRPC's server credentials over certificates that are replaced while it serves."""

import grpc

from buffer_service.security.certificates import Certificates


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials that gRPC asks anew for each handshake; connections that are up keep what they have."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        now = certificates.material()
        return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], now.client_ca)

    return grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, require_client_authentication=certificates.mutual
    )
