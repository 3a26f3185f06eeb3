# syntax=docker/dockerfile:1
FROM golang:1.26 AS build
WORKDIR /src
# Modules rarely change, so their layer is cached while the sources change.
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 go build -trimpath -o /warmroute .
RUN mkdir /state

# Only the binary, and the CA certificates that https:// replicas are verified against.
FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /warmroute /warmroute
# For index.snapshot and recording.file. A new volume mounted here gets this owner.
COPY --from=build --chown=65532:65532 /state /var/lib/warmroute
# A number, because there is no /etc/passwd and Kubernetes' runAsNonRoot requires one.
USER 65532:65532
EXPOSE 8080
# Liveness, not readiness: a restart of the proxy does not help if all replicas are down.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s --retries=3 CMD ["/warmroute", "health"]
ENTRYPOINT ["/warmroute"]
CMD ["serve"]
