package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"time"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

const (
	imageUser = 65532 // as in the Dockerfile
	stateDir  = "var/lib/warmroute"
)

// image returns an archive for `docker load`, of an image with what the Dockerfile puts into it. The CA certificates are those
// of Mozilla in the version that go.mod names.
func image(version, arch string, binary []byte, created time.Time) (file, error) {
	var certificates bytes.Buffer
	for root := range bundle.Roots() {
		if err := pem.Encode(&certificates, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}); err != nil {
			return file{}, err
		}
	}
	layer, err := packTar([]file{
		{"etc/ssl/certs/ca-certificates.crt", 0o644, certificates.Bytes()}, {"warmroute", 0o755, binary}, {stateDir + "/", 0o755, nil},
	}, created)
	if err != nil {
		return file{}, err
	}
	config, err := json.Marshal(object{
		"architecture": arch, "os": "linux", "created": created.Format(time.RFC3339),
		"config": object{
			"User": fmt.Sprintf("%d:%[1]d", imageUser), "Entrypoint": []string{"/warmroute"}, "Cmd": []string{"serve"},
			"ExposedPorts": object{"8080/tcp": object{}}, "WorkingDir": "/",
			"Healthcheck": object{
				"Test": []string{"CMD", "/warmroute", "health"}, "Interval": 10 * time.Second, "Timeout": 5 * time.Second,
				"StartPeriod": 5 * time.Second, "Retries": 3,
			},
		},
		"rootfs":  object{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
		"history": []object{{"created": created.Format(time.RFC3339), "created_by": "scripts/release"}},
	})
	if err != nil {
		return file{}, err
	}
	configName := fmt.Sprintf("%x.json", sha256.Sum256(config))
	manifest, err := json.Marshal([]object{{
		"Config": configName, "RepoTags": []string{"warmroute:" + version, "warmroute:latest"}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return file{}, err
	}
	packed, err := packTarGz([]file{{configName, 0o644, config}, {"layer.tar", 0o644, layer}, {"manifest.json", 0o644, manifest}}, created)
	return file{name: "warmroute-" + version + "-image-" + arch + ".tar.gz", data: packed}, err
}
