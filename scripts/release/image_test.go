package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"
)

// readTar returns the files of an archive by name.
func readTar(t *testing.T, r io.Reader) (headers []*tar.Header, files map[string][]byte) {
	t.Helper()
	files = map[string][]byte{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if err == io.EOF {
			return headers, files
		} else if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(in); err != nil {
			t.Fatal(err)
		}
		headers = append(headers, h)
	}
}

// TestImage checks what a container runtime checks when it loads the image, and what the Dockerfile promises.
func TestImage(t *testing.T) {
	made, err := image("v0.1.0", "arm64", []byte("binary"), time.Unix(1_700_000_000, 0).UTC())
	if err != nil {
		t.Fatal(err)
	}
	unpacked, err := gzip.NewReader(bytes.NewReader(made.data))
	if err != nil {
		t.Fatal(err)
	}
	_, files := readTar(t, unpacked)
	var manifest []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	var config struct {
		Architecture string
		Config       struct {
			User       string
			Entrypoint []string
		}
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal(files["manifest.json"], &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest) != 1 || len(manifest[0].Layers) != 1 || !slices.Contains(manifest[0].RepoTags, "warmroute:v0.1.0") {
		t.Fatalf("manifest %+v", manifest)
	}
	configured, layer := files[manifest[0].Config], files[manifest[0].Layers[0]]
	if err := json.Unmarshal(configured, &config); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprintf("%x.json", sha256.Sum256(configured)) != manifest[0].Config ||
		!slices.Equal(config.RootFS.DiffIDs, []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}) {
		t.Errorf("the digests of %s do not match", configured)
	}
	if config.Architecture != "arm64" || config.Config.User != "65532:65532" ||
		!slices.Equal(config.Config.Entrypoint, []string{"/warmroute"}) {
		t.Errorf("configuration %s", configured)
	}
	headers, contents := readTar(t, bytes.NewReader(layer))
	if string(contents["warmroute"]) != "binary" || !x509.NewCertPool().AppendCertsFromPEM(contents["etc/ssl/certs/ca-certificates.crt"]) {
		t.Errorf("files %v", headers)
	}
	for _, h := range headers {
		if isState := h.Name == stateDir+"/"; isState != (h.Typeflag == tar.TypeDir) || isState != (h.Uid == imageUser) {
			t.Errorf("%s: type %c, user %d", h.Name, h.Typeflag, h.Uid)
		}
	}
}
