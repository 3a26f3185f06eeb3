package main

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
)

func TestPythonVersion(t *testing.T) {
	for version, want := range map[string]string{
		"v0.1.0":                                    "0.1.0",
		"v1.2.3-rc.1":                               "1.2.3rc1",
		"v1.2.3-alpha.2":                            "1.2.3a2",
		"v1.2.3-beta2":                              "1.2.3b2",
		"v0.0.0-20261129084619-b22d1d1b127c":        "0.0.0.dev20261129084619+b22d1d1b127c",
		"v0.1.1-0.20261129084619-b22d1d1b127c":      "0.1.1.dev20261129084619+b22d1d1b127c",
		"v0.1.1-rc.1.0.20261129084619-b22d1d1b127c": "0.1.1.dev20261129084619+b22d1d1b127c",
		"(devel)":                                   "",
		"v1.2":                                      "",
		"v1.2.3-new":                                "",
	} {
		if got, err := pythonVersion(version); got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v, want %q", version, got, err, want)
		}
	}
}

// TestWheel checks that the record of a wheel has each file with its hash and size, and that the binary is executable.
func TestWheel(t *testing.T) {
	binary := []byte("binary")
	licences := []file{{"LICENSE", 0o644, []byte("words")}}
	made, err := wheel("v0.1.0", "arm64", binary, licences, []byte("# warmroute"), time.Unix(1_700_000_000, 0))
	if err != nil {
		t.Fatal(err)
	}
	if want := "warmroute-0.1.0-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_1_aarch64.whl"; made.name != want {
		t.Errorf("name %s, want %s", made.name, want)
	}
	r, err := zip.NewReader(bytes.NewReader(made.data), int64(len(made.data)))
	if err != nil {
		t.Fatal(err)
	}
	files, recorded := map[string]string{}, ""
	for _, f := range r.File {
		in, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		files[f.Name] = string(data)
		if strings.HasSuffix(f.Name, "/RECORD") {
			continue
		}
		sum := sha256.Sum256(data)
		recorded += fmt.Sprintf("%s,sha256=%s,%d\n", f.Name, base64.RawURLEncoding.EncodeToString(sum[:]), len(data))
		if executable := f.Mode()&0o111 != 0; executable != strings.HasSuffix(f.Name, "/scripts/warmroute") {
			t.Errorf("%s has mode %v", f.Name, f.Mode())
		}
	}
	const info = "warmroute-0.1.0.dist-info/"
	if want := recorded + info + "RECORD,,\n"; files[info+"RECORD"] != want {
		t.Errorf("record:\n%s\nwant:\n%s", files[info+"RECORD"], want)
	}
	if files["warmroute-0.1.0.data/scripts/warmroute"] != string(binary) || files[info+"licenses/LICENSE"] != "words" {
		t.Errorf("files %q", files)
	}
	if m := files[info+"METADATA"]; !strings.Contains(m, "\nVersion: 0.1.0\n") || !strings.HasSuffix(m, "\n\n# warmroute") {
		t.Errorf("metadata:\n%s", m)
	}
	if w := files[info+"WHEEL"]; strings.Count(w, "Tag: py3-none-") != 3 {
		t.Errorf("tags:\n%s", w)
	}
}
