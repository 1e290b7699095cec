"""`python -m decode_node`: one decode node, until SIGTERM."""

from baton.core.interrupts import plain_interrupts


def main() -> None:
    with plain_interrupts("decode_node"):
        from baton.core.errors import ConfigError
        from baton.core.supervisor import Supervisor
        from baton.settings.environment import quiet_grpc
        from baton.settings.node_config import DecodeSettings
        from baton.settings.reader import fail, read_settings

        settings = read_settings(DecodeSettings, "decode_node")
        try:
            supervisor = Supervisor(settings.supervisor)  # first: if it ends, this process ends, even while importing
        except ConfigError as error:
            fail("decode_node", error)
        quiet_grpc()  # before gRPC is imported, because it reads the variable then
        # Importing torch takes seconds. It comes after the settings, so that --help and a wrong flag answer at once.
        from baton.node.process import run_node
        from baton.protos.v1 import node_status_pb2
        from prefill_node.roles import ROLES

    run_node("decode_node", settings, supervisor, node_status_pb2.ROLE_DECODE, ROLES)


if __name__ == "__main__":
    main()
