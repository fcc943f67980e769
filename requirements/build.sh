# Builds reproducible wheel and sdist of the last commit in the directory $1. `make dist` runs it.
set -eu
export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
rm -rf build/source "$1"
mkdir -p build "$1"
git archive --prefix=build/source/ HEAD | tar -x
.venv-dist/bin/python -m build --outdir "$1" build/source
# setuptools writes the current time into generated files, so pack the sdist again.
for sdist in "$1"/*.tar.gz; do
    name=$(basename "$sdist" .tar.gz)
    tar -xzf "$sdist" -C build
    tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=pax \
        --pax-option=delete=atime,delete=ctime -C build -c "$name" | gzip -n -9 > "$sdist"
    rm -r "build/$name"
done
