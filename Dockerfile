# syntax=docker/dockerfile:1
FROM golang:1.26 AS build
WORKDIR /src
# Modules change seldom: their layer is kept while the sources change.
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 go build -trimpath -o /warmroute .
RUN mkdir /state

# Nothing but the binary and the roots that an https:// replica's certificate is checked against.
FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /warmroute /warmroute
# For index.snapshot and record.file: a volume mounted here takes over the owner.
COPY --from=build --chown=65532:65532 /state /var/lib/warmroute
# By number: there is no /etc/passwd, and Kubernetes' runAsNonRoot wants one.
USER 65532:65532
EXPOSE 8080
# Alive, not ready: a proxy whose replicas are all down is no better for a restart.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s --retries=3 CMD ["/warmroute", "health"]
ENTRYPOINT ["/warmroute"]
CMD ["serve"]
