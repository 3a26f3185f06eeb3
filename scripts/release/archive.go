package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"time"
)

// archive packs files into folder, as .tar.gz: in order of their names, all of
// them from one moment and root's, and nothing of the machine that did it.
func archive(folder string, files []file, made time.Time) ([]byte, error) {
	var packed bytes.Buffer
	zip, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	out := tar.NewWriter(zip)
	for _, f := range sorted(files) {
		err := out.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: folder + "/" + f.name, Mode: f.mode, Size: int64(len(f.data)),
			ModTime: made, Uname: "root", Gname: "root", Format: tar.FormatUSTAR,
		})
		if err != nil {
			return nil, err
		}
		if _, err := out.Write(f.data); err != nil {
			return nil, err
		}
	}
	if err := out.Close(); err != nil {
		return nil, err
	}
	if err := zip.Close(); err != nil {
		return nil, err
	}
	return packed.Bytes(), nil
}

func checksum(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
