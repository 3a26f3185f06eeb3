package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestArchiveDependsOnFilesOnly(t *testing.T) {
	made := time.Unix(1_700_000_000, 0)
	a := []file{{"warmroute", 0o755, []byte("binary")}, {"LICENSE", 0o644, []byte("words")}, {"docs/a.md", 0o644, nil}}
	b := slices.Clone(a)
	slices.Reverse(b)
	first, err := packTarGz(inFolder("warmroute-v1", a), made)
	if err != nil {
		t.Fatal(err)
	}
	second, err := packTarGz(inFolder("warmroute-v1", b), made.In(time.FixedZone("elsewhere", 7200)))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, second) {
		t.Error("the archive depends on the order of the files or the time zone")
	}
	zip, err := gzip.NewReader(bytes.NewReader(first))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for in := tar.NewReader(zip); ; {
		h, err := in.Next()
		if err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
		if !h.ModTime.Equal(made) || h.Uid != 0 || (h.Mode == 0o755) != strings.HasSuffix(h.Name, "/warmroute") {
			t.Errorf("%s: %v, user %d, mode %o", h.Name, h.ModTime, h.Uid, h.Mode)
		}
	}
	if want := []string{"warmroute-v1/LICENSE", "warmroute-v1/docs/a.md", "warmroute-v1/warmroute"}; !slices.Equal(names, want) {
		t.Errorf("got %q", names)
	}
}

func TestCompareNamesDifferences(t *testing.T) {
	a := []file{{name: "one", data: []byte("1")}, {name: "two", data: []byte("2")}}
	if err := compareBuilds(a, slices.Clone(a)); err != nil {
		t.Error(err)
	}
	b := slices.Clone(a)
	b[1].data = []byte("3")
	if err := compareBuilds(a, b); err == nil || !strings.HasSuffix(err.Error(), ": two and two") || strings.Contains(err.Error(), "one and") {
		t.Errorf("got %v", err)
	}
	if err := compareBuilds(a, a[:1]); err == nil {
		t.Error("a missing file is not noticed")
	}
}

// TestShippedLinksResolve follows the links of the shipped documents, and checks the files
// that the compose file mounts.
func TestShippedLinksResolve(t *testing.T) {
	files, err := (&checkout{dir: "../.."}).shippedFiles()
	if err != nil {
		t.Fatal(err)
	}
	packed, links := map[string]bool{}, 0
	for _, f := range files {
		for name := f.name; name != "."; name = path.Dir(name) {
			packed[name] = true
		}
	}
	for _, f := range files {
		link := regexp.MustCompile(`\]\(([^)\s#]+)[^)\s]*\)`)
		switch {
		case f.name == "docker-compose.yml":
			link = regexp.MustCompile(`(?m)^[^#\n]*[ "](\./[^:"\s}]+)[:}]`)
		case path.Ext(f.name) != ".md":
			continue
		}
		for _, to := range link.FindAllStringSubmatch(string(f.data), -1) {
			links++
			if !strings.Contains(to[1], "://") && !packed[path.Join(path.Dir(f.name), to[1])] {
				t.Errorf("%s: %s is not in the archive", f.name, to[1])
			}
		}
	}
	if links == 0 {
		t.Error("no link was checked")
	}
}

// TestShippedDockerfile checks that the archive has what its Dockerfile copies, and that the image is like that of the
// repository.
func TestShippedDockerfile(t *testing.T) {
	files, err := (&checkout{dir: "../.."}).shippedFiles()
	if err != nil {
		t.Fatal(err)
	}
	packed := map[string]string{"warmroute": ""} // which buildPlatform adds
	for _, f := range files {
		packed[f.name] = string(f.data)
	}
	for _, source := range regexp.MustCompile(`(?m)^COPY ([^-\s]\S*) `).FindAllStringSubmatch(packed["Dockerfile"], -1) {
		if _, ok := packed[source[1]]; !ok {
			t.Errorf("the Dockerfile copies %s, which is not in the archive", source[1])
		}
	}
	own, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	settings := regexp.MustCompile(`(?m)^(USER|EXPOSE|HEALTHCHECK|ENTRYPOINT|CMD) .*$`)
	if got, want := settings.FindAllString(packed["Dockerfile"], -1), settings.FindAllString(string(own), -1); !slices.Equal(got, want) ||
		len(want) != 5 {
		t.Errorf("the image of the archive has %q, that of the repository %q", got, want)
	}
	if _, ok := packed[".dockerignore"]; ok {
		t.Error(".dockerignore keeps the binary out of the build")
	}
}

func TestLicenceIDs(t *testing.T) {
	own, err := os.ReadFile("../../LICENSE")
	if err != nil {
		t.Fatal(err)
	}
	f := func(text string, want ...string) {
		t.Helper()
		if got := licenceIDs([]byte(text)); !slices.Equal(got, want) {
			t.Errorf("%.40q: got %q, want %q", text, got, want)
		}
	}
	f(string(own), "Apache-2.0")
	f("Redistributions in binary form must reproduce … Neither the name … may be used to\n  endorse or promote products derived from",
		"BSD-3-Clause")
	f("Redistributions in binary form must reproduce the above", "BSD-2-Clause")
	f("SIL OPEN FONT LICENSE Version 1.1 … Permission is hereby granted, free of charge", "OFL-1.1")
	f("Permission is hereby granted,\nfree of charge … Licensed under the Apache License, Version 2.0 (the", "Apache-2.0", "MIT")
	f("All rights reserved.")
}

func TestLicencesUpToModuleRoot(t *testing.T) {
	root := t.TempDir()
	for _, name := range []string{"LICENSE", "a/NOTICE.txt", "a/b/licence.go", "a/b/code", "licenses/ftl.txt", "other/LICENSE"} {
		path := filepath.Join(root, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("Permission is hereby granted, free of charge"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m := &module{path: "m"}
	for range 2 {
		if err := m.addLicences(root, filepath.Join(root, "a", "b")); err != nil {
			t.Fatal(err)
		}
	}
	var names []string
	for _, l := range sortFiles(m.licences) {
		names = append(names, l.name)
	}
	if want := []string{"LICENSE", "a/NOTICE.txt", "licenses/ftl.txt"}; !slices.Equal(names, want) || !slices.Equal(m.ids, []string{"MIT"}) {
		t.Errorf("got %q, %q", names, m.ids)
	}
}

func TestSBOM(t *testing.T) {
	info := &buildinfo.BuildInfo{
		GoVersion: "go1.26.8", Main: debug.Module{Path: "warmroute", Version: "v0.1.0"},
		Settings: []debug.BuildSetting{{Key: "GOARCH", Value: "arm64"}},
	}
	linked := []*module{{path: "example.org/m", version: "v1.2.3", sum: "h1:x", ids: []string{"MIT"}},
		{path: "std", version: "1.26.8", ids: []string{"BSD-3-Clause"}}}
	first, err := sbom(info, []byte("binary"), linked, time.Unix(0, 0).UTC())
	if err != nil {
		t.Fatal(err)
	}
	if again, _ := sbom(info, []byte("binary"), linked, time.Unix(0, 0).UTC()); !bytes.Equal(first, again) {
		t.Error("two SBOMs of one binary differ")
	}
	var got struct {
		Metadata struct {
			Component struct {
				Version string
				Hashes  []struct{ Content string }
			}
		}
		Components []struct {
			Purl     string
			Licenses []struct{ License struct{ ID string } }
		}
		Dependencies []struct{ DependsOn []string }
	}
	if err := json.Unmarshal(first, &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Components) != 2 || got.Components[0].Purl != "pkg:golang/example.org/m@v1.2.3" ||
		got.Components[0].Licenses[0].License.ID != "MIT" {
		t.Errorf("components %+v", got.Components)
	}
	if c := got.Metadata.Component; c.Hashes[0].Content != fmt.Sprintf("%x", sha256.Sum256([]byte("binary"))) || c.Version != "v0.1.0" {
		t.Errorf("main component %+v", c)
	}
	if len(got.Dependencies) != 1 || len(got.Dependencies[0].DependsOn) != 2 {
		t.Errorf("dependencies %+v", got.Dependencies)
	}
}
