// Release builds the release files of a commit: for each platform an archive with the
// binary, its documentation and its licences, a Python wheel, an image for `docker load`
// and an SBOM, and the checksums of all.
// The same commit and the same Go version give the same bytes on any machine.
//
//	go run ./scripts/release                  HEAD, for linux on amd64 and arm64, into dist/
//	go run ./scripts/release --ref v0.1.0     another commit
//	go run ./scripts/release --verify         build twice, from two clones, and compare
//	go run ./scripts/release --verify --fresh the second time with an empty build cache
package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

func main() {
	out := flag.String("out", "dist", "`FOLDER` for the files; files of other commits in it stay")
	ref := flag.String("ref", "HEAD", "`COMMIT` to build; uncommitted changes are not included")
	verify := flag.Bool("verify", false, "build again from another clone, and fail unless every byte is the same")
	fresh := flag.Bool("fresh", false, "with --verify: use an empty build cache for the second build")
	flag.Parse()
	if err := buildAndWrite(*out, *ref, *verify, *fresh); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func buildAndWrite(out, ref string, verify, fresh bool) error {
	work, err := os.MkdirTemp("", "warmroute-release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	files, err := cloneAndBuild(filepath.Join(work, "first"), ref)
	if err != nil {
		return err
	}
	if verify {
		var env []string
		if fresh {
			env = append(env, "GOCACHE="+filepath.Join(work, "cache"))
		}
		// A path of another length, so that paths in the output are noticed.
		again, err := cloneAndBuild(filepath.Join(work, "second-clone"), ref, env...)
		if err != nil {
			return err
		}
		if err := compareBuilds(files, again); err != nil {
			return err
		}
		fmt.Printf("built twice, from two clones: %d files, all bytes equal\n", len(files))
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(out, f.name), f.data, 0o644); err != nil {
			return err
		}
		fmt.Printf("%9d  %s\n", len(f.data), filepath.Join(out, f.name))
	}
	return nil
}

// file is a release file or a file of an archive.
type file struct {
	name string // with slashes
	mode int64
	data []byte
}

// compareBuilds returns an error that names every file in which two builds differ.
func compareBuilds(a, b []file) error {
	if len(a) != len(b) {
		return fmt.Errorf("one build made %d files, the other %d", len(a), len(b))
	}
	var errs []error
	for i := range a {
		if a[i].name != b[i].name || !bytes.Equal(a[i].data, b[i].data) {
			errs = append(errs, fmt.Errorf("two builds of one commit differ: %s and %s", a[i].name, b[i].name))
		}
	}
	return errors.Join(errs...)
}

// sortFiles sorts files by name and returns them.
func sortFiles(files []file) []file {
	slices.SortFunc(files, func(a, b file) int { return cmp.Compare(a.name, b.name) })
	return files
}

// packTarGz returns a .tar.gz of the files, which depends on nothing else.
func packTarGz(files []file, modified time.Time) ([]byte, error) {
	archive, err := packTar(files, modified)
	if err != nil {
		return nil, err
	}
	var packed bytes.Buffer
	gz := gzip.NewWriter(&packed)
	_, err = gz.Write(archive)
	err = errors.Join(err, gz.Close())
	return packed.Bytes(), err
}

// packTar returns a .tar of the files. Those whose names end in a slash are folders, of the image's user.
func packTar(files []file, modified time.Time) ([]byte, error) {
	var packed bytes.Buffer
	tw := tar.NewWriter(&packed)
	for _, f := range sortFiles(slices.Clone(files)) {
		header := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), ModTime: modified, Uname: "root", Gname: "root"}
		if strings.HasSuffix(f.name, "/") {
			header.Typeflag, header.Uid, header.Gid, header.Uname, header.Gname = tar.TypeDir, imageUser, imageUser, "", ""
		}
		if err := tw.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := tw.Write(f.data); err != nil {
			return nil, err
		}
	}
	err := tw.Close()
	return packed.Bytes(), err
}

// checksums returns SHA256SUMS, as sha256sum -c reads it.
func checksums(files []file) file {
	var lines strings.Builder
	for _, f := range files {
		fmt.Fprintf(&lines, "%x  %s\n", sha256.Sum256(f.data), f.name)
	}
	return file{name: "SHA256SUMS", data: []byte(lines.String())}
}
