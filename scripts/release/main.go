// Release builds what is published of a commit: for each platform an archive with
// the binary and what belongs beside it, a bill of materials, and the checksums of
// all of them. The same commit and the same Go give the same bytes anywhere.
//
//	go run ./scripts/release                  HEAD, for linux on amd64 and arm64, into dist/
//	go run ./scripts/release --ref v0.1.0     another commit
//	go run ./scripts/release --verify         everything twice, from two clones, and compared
//	go run ./scripts/release --verify --fresh the second time with an empty build cache
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	out := flag.String("out", "dist", "`FOLDER` for what was built; what it has of other commits stays")
	ref := flag.String("ref", "HEAD", "`COMMIT` to build; changes that are not committed are never in it")
	archs := flag.String("arch", "amd64,arm64", "architectures, separated by commas")
	verify := flag.Bool("verify", false, "build all of it once more from another clone, and fail unless every byte is the same")
	fresh := flag.Bool("fresh", false, "with --verify: the second time with an empty build cache")
	flag.Parse()
	if err := release(*out, *ref, strings.Split(*archs, ","), *verify, *fresh); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func release(out, ref string, archs []string, verify, fresh bool) error {
	work, err := os.MkdirTemp("", "warmroute-release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	files, err := build(filepath.Join(work, "first"), ref, archs, "")
	if err != nil {
		return err
	}
	if verify {
		cache := ""
		if fresh {
			cache = filepath.Join(work, "cache")
		}
		// Its path has another length, so that nothing of it goes unnoticed.
		again, err := build(filepath.Join(work, "and-once-more"), ref, archs, cache)
		if err != nil {
			return err
		}
		if err := same(files, again); err != nil {
			return err
		}
		fmt.Printf("built twice, from two clones: %d files, every byte the same\n", len(files))
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

// file is one to be published, or one of an archive.
type file struct {
	name string // with slashes
	mode int64
	data []byte
}

// same is an error that names every file in which the two differ.
func same(a, b []file) error {
	if len(a) != len(b) {
		return fmt.Errorf("one build made %d files, the other %d", len(a), len(b))
	}
	var differing []error
	for i := range a {
		if a[i].name != b[i].name || !bytes.Equal(a[i].data, b[i].data) {
			differing = append(differing, fmt.Errorf("%s and %s, of two builds of one commit, differ", a[i].name, b[i].name))
		}
	}
	return errors.Join(differing...)
}

// sums is SHA256SUMS over the files, as sha256sum -c reads it.
func sums(files []file) file {
	var lines strings.Builder
	for _, f := range files {
		fmt.Fprintf(&lines, "%s  %s\n", checksum(f.data), f.name)
	}
	return file{name: "SHA256SUMS", data: []byte(lines.String())}
}

// sorted are the files by their names.
func sorted(files []file) []file {
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.name, b.name) })
	return files
}
