package main

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"time"
)

// wheelPlatforms are the platform tags of the architectures. The binary is static: it needs no C library.
var wheelPlatforms = map[string]string{
	"amd64": "manylinux_2_17_x86_64.manylinux2014_x86_64.musllinux_1_1_x86_64",
	"arm64": "manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_1_aarch64",
}

// goVersion matches the versions of Go: of a tag, with a pre-release, or of a commit after a tag.
var goVersion = regexp.MustCompile(`^v(\d+\.\d+\.\d+)(?:-(?:(a|b|alpha|beta|rc)\.?(\d+)|(?:(?:.+\.)?0\.)?(\d{14})-([0-9a-f]{12})))?$`)

// pythonVersion returns a version of Go as PEP 440 has it.
func pythonVersion(version string) (string, error) {
	m := goVersion.FindStringSubmatch(version)
	switch {
	case m == nil:
		return "", fmt.Errorf("version %s is neither that of a tag like v1.2.3 or v1.2.3-rc.1 nor that of a commit", version)
	case m[2] != "":
		return m[1] + strings.NewReplacer("alpha", "a", "beta", "b").Replace(m[2]) + m[3], nil
	case m[4] != "":
		return m[1] + ".dev" + m[4] + "+" + m[5], nil
	}
	return m[1], nil
}

// wheel returns a Python wheel that installs the binary as the command warmroute.
func wheel(version, arch string, binary []byte, licences []file, readme []byte, modified time.Time) (file, error) {
	version, err := pythonVersion(version)
	if err != nil {
		return file{}, err
	}
	name, tag := "warmroute-"+version, "py3-none-"+wheelPlatforms[arch]
	info := name + ".dist-info/"
	var metadata, tags strings.Builder
	fmt.Fprintf(&metadata, "Metadata-Version: 2.4\nName: warmroute\nVersion: %s\n"+
		"Summary: A proxy in front of vLLM replicas that routes by prefix cache and queue\nLicense-Expression: Apache-2.0\n", version)
	files := []file{{name + ".data/scripts/warmroute", 0o755, binary}}
	for _, l := range licences {
		fmt.Fprintf(&metadata, "License-File: %s\n", l.name)
		files = append(files, file{info + "licenses/" + l.name, 0o644, l.data})
	}
	fmt.Fprintf(&metadata, "Requires-Python: >=3.8\nDescription-Content-Type: text/markdown\n\n%s", readme)
	for platform := range strings.SplitSeq(wheelPlatforms[arch], ".") {
		fmt.Fprintf(&tags, "Tag: py3-none-%s\n", platform)
	}
	files = append(files,
		file{info + "METADATA", 0o644, []byte(metadata.String())},
		file{info + "WHEEL", 0o644, []byte("Wheel-Version: 1.0\nGenerator: warmroute\nRoot-Is-Purelib: false\n" + tags.String())})
	var record strings.Builder
	for _, f := range files {
		sum := sha256.Sum256(f.data)
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", f.name, base64.RawURLEncoding.EncodeToString(sum[:]), len(f.data))
	}
	fmt.Fprintf(&record, "%sRECORD,,\n", info)
	files = append(files, file{info + "RECORD", 0o644, []byte(record.String())})
	packed, err := packZip(files, modified)
	return file{name: name + "-" + tag + ".whl", data: packed}, err
}

// packZip returns a .zip of the files in their order.
func packZip(files []file, modified time.Time) ([]byte, error) {
	var packed bytes.Buffer
	w := zip.NewWriter(&packed)
	for _, f := range files {
		header := &zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: modified}
		header.SetMode(fs.FileMode(f.mode))
		to, err := w.CreateHeader(header)
		if err != nil {
			return nil, err
		}
		if _, err := to.Write(f.data); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return packed.Bytes(), err
}
