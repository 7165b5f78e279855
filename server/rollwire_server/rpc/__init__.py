"""The gRPC services: thin views of the sequences and the weight updates.

How a call goes through the server: ``AuthInterceptor`` checks its token → ``CallInterceptor``
limits it, parses its message and binds its names for the log → the method of its service. Whatever
``ServiceError`` that raises, the ``CallInterceptor`` makes the status of the call.
"""
